"""One file per benchmark; each runs its competitors in turn, keeps raw samples and prints medians with spread."""
