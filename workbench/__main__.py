"""`python -m workbench` is `wb`."""

from workbench.cli import main

main()
