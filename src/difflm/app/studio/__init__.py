"""The studio and the player: texts while they are denoised, as frames and on a page."""

from difflm.app.studio.player import PlayedText, Recording, write_player

__all__ = ["PlayedText", "Recording", "write_player"]
