"""The studio: a page and an HTTP API that generate texts."""
