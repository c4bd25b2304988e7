"""What our own looks at a picture find, in words that a message can end with."""


class PictureProblemError(ValueError):
    """The text says why a picture cannot be used and what to do; `decode` puts the file's name before it."""
