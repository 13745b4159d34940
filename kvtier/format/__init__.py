"""What makes two blocks interchangeable, and every byte of one."""
