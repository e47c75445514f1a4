"""What happened: typed events, their codec, the state they fold into, and the auditor. No torch, no zmq, no clock."""
