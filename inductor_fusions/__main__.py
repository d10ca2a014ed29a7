"""`python -m inductor_fusions`."""

from .cli import main

if __name__ == "__main__":
    main()
