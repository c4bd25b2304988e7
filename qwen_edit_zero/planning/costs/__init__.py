"""Time, money and disks."""
