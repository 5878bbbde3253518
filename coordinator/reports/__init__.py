"""What people ask of the books: reports and certificates, each as data first, then as a page, a PDF or JSON. Pure."""
