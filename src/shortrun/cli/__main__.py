"""``python -m shortrun.cli``, which ``torchrun -m shortrun.cli`` needs."""

from shortrun.cli import main

main()
