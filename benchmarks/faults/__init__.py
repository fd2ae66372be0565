"""`jhpt bench faults`: real runs are killed, their files damaged, their processes stopped; what is lost is counted."""
