"""The benchmark of manners: who is let finish, what stops an answer and what does not, and when nothing is said."""
