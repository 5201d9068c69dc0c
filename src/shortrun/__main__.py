"""``python -m shortrun`` is the command line."""

from shortrun.cli import main

if __name__ == "__main__":
    main()
