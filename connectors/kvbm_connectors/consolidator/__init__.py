"""The consolidator: engines' event streams in, events in our own names out on the bus."""
