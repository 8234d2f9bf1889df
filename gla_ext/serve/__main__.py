from gla_ext.serve.command import main

main()
