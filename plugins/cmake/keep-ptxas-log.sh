#!/bin/sh
# Compiler launcher of nvcc: what `ptxas -v` says of the kernels goes to OBJECT.ptxas, all else where it would have gone.
previous='' object=''
for argument; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
"$@" 2>"$object.ptxas"
status=$?
grep -v -e '^ptxas info' -e ' bytes stack frame' "$object.ptxas" >&2
exit $status
