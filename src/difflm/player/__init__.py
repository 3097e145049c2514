"""Texts while they are denoised, as frames, and the page that plays them again."""
