"""A value that somebody sent, as an error message shows it: short, on one line, whatever it is."""

MOST = 80


def shown(value: object, most: int = MOST) -> str:
    """`repr` of the value, at most `most` characters; its type where it cannot be printed."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # such as an integer of thousands of digits, or a __repr__ that fails
        text = f"of type {type(value).__name__} and cannot be printed"
    return text if len(text) <= most else text[: most - 3] + "..."
