"""What the checks of this lesson share: the first difference that counts."""

from manyhands.checks.engine.values import first_difference, same


def say_first(found: dict, wanted: dict) -> str:
    """The first part that differs, in the order in which the parts come about.

    Where an early part differs, later ones may be missing, and say nothing.
    """
    for name, value in wanted.items():
        if name in found and not same(found[name], value):
            return first_difference({name: found[name]}, {name: value})
    return first_difference(found, wanted)
