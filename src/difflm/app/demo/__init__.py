"""A page that runs a model in the browser: a folder of plain files for any static web server."""
