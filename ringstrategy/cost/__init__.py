"""What an exchange will cost on given machines: measured figures, and the schedules run against a clock."""
