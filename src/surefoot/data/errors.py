"""What is wrong with data, said before the first step."""


class DataError(Exception):
    """Data that cannot be trained on. The text gives the file, the offset where there is one, the rule and the way out."""
