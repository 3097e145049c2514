"""From a request to texts."""
