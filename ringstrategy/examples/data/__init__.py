"""Data that need no download: digits, source text, linear regression."""
