"""The observers and taps of a runner, as its plan has them."""

from headrace.config.plan import Plan
from headrace.observers.step_observer import NO_OBSERVERS, Observers
from headrace.observers.tap import NO_TAPS, Taps


def build_taps(plan: Plan) -> Taps:
    """Device work around every forward."""
    return NO_TAPS


def build_observers(plan: Plan) -> Observers:
    """Contexts of the host around every forward."""
    return NO_OBSERVERS
