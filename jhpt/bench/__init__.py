"""One module per benchmark, which runs its competitors in turn, keeps raw samples and prints medians with spread."""
