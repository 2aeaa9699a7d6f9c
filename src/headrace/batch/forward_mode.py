"""What kind of step a batch is."""

from enum import Enum, auto


class ForwardMode(Enum):
    """EXTEND: new prompt tokens. DECODE: one token a row. MIXED: both. IDLE: nothing to do, the
    rank still joins its collectives. TARGET_VERIFY and DRAFT_EXTEND belong to speculation."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()

    @property
    def is_extend(self) -> bool:
        """Rows may have more than one new token."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND)

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE
