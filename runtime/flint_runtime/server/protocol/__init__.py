"""Request bodies: which fields there are, and their types. Their ranges are checked by whoever uses them."""
