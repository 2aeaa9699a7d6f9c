"""The form of an answer: grammars, what compiles them, and the mask of a sequence."""
