"""What a person does with a stack, before, while and after: ``python -m ops``, and the same as functions.

``from ops import Stack``: its methods are the commands' verbs, return typed results, raise :class:`ops.errors.OpsError` or
:class:`config.BadInput`, and print nothing.
"""
