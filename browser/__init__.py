"""A page that runs a model in the browser: a directory of plain files for any static web server."""
