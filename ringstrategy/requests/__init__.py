"""Requests between processes that follow no common schedule: ask and answer, with tensors."""

from ringstrategy.requests.client import Client
from ringstrategy.requests.mailbox import POLL, MailboxClient, MailboxServer
from ringstrategy.requests.messages import Answer, Body, RefusedError, Request
from ringstrategy.requests.server import Server

__all__ = ["POLL", "Answer", "Body", "Client", "MailboxClient", "MailboxServer", "RefusedError", "Request", "Server"]
