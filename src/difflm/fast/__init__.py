"""The same models, faster: copies in narrow numbers, captured steps, kernels. What lies below does not know of it."""
