"""A checkpoint in another form: on other ranks, whole, or in files of another format."""
