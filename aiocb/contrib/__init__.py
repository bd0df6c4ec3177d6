"""What joins an engine to other systems: `ray`, by the extra of that name."""
