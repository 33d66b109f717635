"""Protocol between parent and children: requests, messages, and the child's end of the pipe."""
