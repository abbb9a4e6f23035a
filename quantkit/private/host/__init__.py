"""The host of split inference: the blocks run here."""
