"""What a person does with a stack, before, while and after: ``python -m ops``, and the same as functions.

``from ops import Stack``: its methods are the commands' verbs, return typed results, raise :class:`ops.errors.OpsError` or
:class:`config.BadInput`, and print nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.inside import Job as Job
    from ops.stack import Gone as Gone
    from ops.stack import Stack as Stack
    from ops.stack import Status as Status
    from ops.stack import Update as Update

__all__ = ["Gone", "Job", "Stack", "Status", "Update"]


def __getattr__(name: str) -> Any:
    """The engine's and Kubernetes' packages take a second to import; a command that needs neither should not wait for them."""
    if name in __all__:
        from ops import inside, stack

        return getattr(inside if name == "Job" else stack, name)
    raise AttributeError(f"module 'ops' has no attribute {name!r}")
