"""Faster pieces of a decoder, each replaceable on its own; :mod:`training.fast.choose` says which are used, and why."""
