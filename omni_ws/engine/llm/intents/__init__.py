"""What answers by rules understand: tables of what people say and what is said to that, a module for each topic."""
