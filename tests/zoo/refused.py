"""Families that cannot be captured: their forward decides by values of activations, or runs Python that no graph has.

Each has the part of the message that a user gets, with the line that decides.
"""

REFUSED: dict[str, str] = {}
"""Family -> regular expression that the message of the refusal holds."""
