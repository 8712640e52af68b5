"""What a server keeps and merges for learners that follow no common schedule."""
