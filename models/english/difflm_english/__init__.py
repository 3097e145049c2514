"""The files of the model `english`, which difflm finds by the entry point `difflm.models`."""
