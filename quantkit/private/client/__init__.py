"""The client of split inference: embedding and head run here."""
