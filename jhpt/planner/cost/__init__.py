"""What a plan costs: seconds, bytes in memory and bytes on the wire, layer by layer and for the whole step."""
