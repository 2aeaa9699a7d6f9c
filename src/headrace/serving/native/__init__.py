"""SGLang's native form of a request, for clients that speak it."""
