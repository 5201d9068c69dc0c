"""``python -m shortrun.cli``, which ``accelerate launch -m shortrun.cli`` needs."""

from shortrun.cli import main

main()
