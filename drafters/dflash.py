"""DFlash (arXiv 2602.06036): a block drafter whose slots are independent given the context.

All of it is in drafters/block.py; this is the released form, `fill_in` with the target's frozen embedding and head.
"""

from drafters.block import BlockDrafter


class DFlash(BlockDrafter):
    """DFlash drafter; arguments as in BlockDrafter."""
