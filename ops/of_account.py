"""The stack's verbs that ask the AWS account: doctor, plan, cost, leftovers. Part of :class:`ops.stack.Stack`."""

from __future__ import annotations

from collections.abc import Sequence

from ops import cost as costs
from ops import doctor as doctors
from ops import leftovers as left
from ops import plan as plans
from ops.target import Target


class OfAccount:
    """Raises AwsError where the account says no, BadInput for a stack that has nothing in AWS. Only ``doctor`` with pin or probe changes anything."""

    target: Target

    def doctor(self, *, pin: bool = False, probe: bool = False, regions: Sequence[str] = ()) -> doctors.Report:
        """Can it be built, here and now? See :func:`ops.doctor.examine`."""
        return doctors.examine(self.target.name, pin=pin, probing=probe, regions=regions, folder=self.target.file.parent)

    def plan(self, *, offline: bool = False) -> plans.Plan:
        """What `up` would build, and what it would cost."""
        return plans.plan(self.target, offline=offline)

    def cost(self) -> costs.Spent:
        """What it has cost so far, and each of its runs."""
        return costs.so_far(self.target)

    def leftovers(self) -> left.Found:
        """What is in the account of it; :func:`ops.sweep.deletable` and :func:`ops.sweep.delete` remove what carries its tags."""
        return left.find(self.target)
