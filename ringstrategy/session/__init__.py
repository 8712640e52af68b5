"""A module's training on several ranks, without a framework; frameworks' doors are adapters over it."""

from ringstrategy.session.session import Session

__all__ = ["Session"]
