"""Opening any decoder, the text it is examined on, and probes that run it more than once."""
