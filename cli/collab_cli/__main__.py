"""`python -m collab_cli` is `collab`."""

from collab_cli.app import main

main()
