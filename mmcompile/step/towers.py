"""`towers`: what of a plan is balanced as one."""

from mmcompile.plan.towers import towers as towers
