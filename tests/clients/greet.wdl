version 1.0

task greet {
  input {
    String who
  }
  command <<<
    echo "hello ~{who}" | tee greeting.txt
  >>>
  output {
    String greeting = read_string("greeting.txt")
  }
  runtime {
    docker: "any"
    memory: "1GB"
  }
}
