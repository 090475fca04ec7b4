"""What a machine lacks to take part in a run, found out before it joins.

Every question is a `Check`: it is never an exception. Beginning with the quickest:
    packages    Python and what Collab needs
    machine     shared memory, open files, disk; what memory is left
    peers       whether those in the invite answer, and if not, why
    visit       a guest's visit to the run: port, daemon, dial-back, clock, speed, versions, manifest

What only a trainer knows, such as the memory its model takes, is in `collab_trainer.fitness`.
"""

from collab_core.doctor.check import BOTH, Check, Role, guarded, possible_roles

__all__ = ["BOTH", "Check", "Role", "guarded", "possible_roles"]
