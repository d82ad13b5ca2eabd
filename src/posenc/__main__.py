"""``python -m posenc``: the command line."""

from posenc.lab.cli import main

if __name__ == "__main__":
    main()
